"""Tests for adapters. `SchedulerContract` is what every scheduler that is made with the seam must do.

    contract      `SchedulerContract`, with one test for each question that people ask of a job
    contract_apps the apps that the tests submit
    shell         another shell: `python -m muster.testing.shell`, which the tests start, and kill

An adapter's own test file derives a class from it, and pytest runs what it inherits:

    from muster.testing import SchedulerContract

    class TestFolders(SchedulerContract):
        factory = "folder_adapter:create_scheduler"

It needs pytest, and knows `muster.schedulers.adapter` only. From outside, import `SchedulerContract` from this package.
"""

import pytest

pytest.register_assert_rewrite("muster.testing.contract")  # a failed assertion shows its values, as in a test file

from muster.testing.contract import SchedulerContract  # noqa: E402

__all__ = ["SchedulerContract"]
