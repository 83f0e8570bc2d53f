"""Test data that ships with headfit: a tiny trained DeepSeek-V4 checkpoint and the generator of its problems."""
