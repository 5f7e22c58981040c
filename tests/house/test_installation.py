"""The package as it was installed for these tests."""

import subprocess
import sys

from tests.support.launch import job_environment


def test_a_folder_of_the_same_name_does_not_hide_the_package(tmp_path):
    """The checkout seen from the folder above it is one."""
    (tmp_path / "mpipipe").mkdir()
    env = job_environment()
    del env["PYTHONPATH"]  # which names the checkout
    command = [sys.executable, "-m", "mpipipe", "--version"]
    job = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert job.returncode == 0 and job.stdout.startswith("mpipipe "), job
