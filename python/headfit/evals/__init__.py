"""GSM8K and AIME25 against a server or in process, and the statistics that say what a run could have detected.

    datasets -> tasks -> server | local -> store -> score -> compare -> report
                                                      ^
                                            extract, statistics

A run is one JSONL file (`store.py`): its settings, then every answer's raw text. Scores, comparisons and reports are
computed from such files, so they need neither a server nor the data set.

lm-evaluation-harness 0.4.13 is not the engine, for what its API models do with failures: a chat answer that does not
parse, or without content, becomes an empty or placeholder text that is scored as wrong; `finish_reason` is dropped, so
answers cut by the token cap are not told from wrong ones; sampled requests are never cached, so AIME25's repeats cannot
be resumed; and its cache knows a request by its text alone, not by data set, question and repeat. Its GSM8K prompt form
is used here, so that numbers stay comparable; `extract.py` says where its filters differ.
"""
