"""What holds for every test run: in CI a skip counts as a failure.

A test that this kind of machine cannot run says so by a reason that begins with "hardware:"
(no GPU, no RDMA); every other skip in CI is something the setup forgot to install.
"""

import os

import pytest

pytest_plugins = ["kvconnect.testing.cluster.plugin"]

ALLOWED = "hardware:"


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note modules skipped as a whole."""
    _note(report)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note skipped tests; an expected failure is not one."""
    if not hasattr(report, "wasxfail"):
        _note(report)


_skipped: list[str] = []


def _note(report: pytest.CollectReport | pytest.TestReport) -> None:
    if not report.skipped:
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not reason.removeprefix("Skipped: ").startswith(ALLOWED):
        _skipped.append(f"{report.nodeid}: {reason}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the CI run that skipped something."""
    if _skipped and os.environ.get("CI") == "true" and session.exitstatus in {0, 5}:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name what was skipped and failed the run."""
    if _skipped and os.environ.get("CI") == "true":
        terminalreporter.section("skipped in CI, which fails the run", red=True)
        for line in _skipped:
            terminalreporter.line(line)
