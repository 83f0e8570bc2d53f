"""The plugin in stock SGLang versions, on their real classes; see `checks.py` for what each check holds."""

import checks
import prepare
import pytest

CASES = [
    pytest.param(version, f"{scenario}/{function.__name__}", id=f"{version}-{scenario}-{function.__name__}")
    for version in prepare.VERSIONS
    for scenario, (_, functions) in checks.SCENARIOS.items()
    if version in checks.ONLY_IN.get(scenario, (version,))
    for function in functions
]


@pytest.mark.parametrize("version, check", CASES)
def test_check(results, version, check):
    found = results(version)[check]
    assert found == "ok", f"SGLang {version}, {check}:\n{found}"


@pytest.mark.parametrize("version", prepare.VERSIONS)
def test_the_launcher_is_left_alone(results, version):
    assert results(version)["launcher/nothing_is_hooked"] == "ok"
