"""ReFrame checks of an installed mpipipe: a training by several ranks, and the machinery against bare mpi4py.

    reframe -C jobs/site/reframe/settings.py -c jobs/site/reframe/checks.py -r
    reframe -C ... -c ... -r -S python=/path/to/python --system=cluster

Rates are recorded without limits: set `reference` of your system once you know what is usual there.
"""

import sys

import reframe as rfm
import reframe.utility.sanity as sn
from reframe.core.builtins import parameter, performance_function, run_after, sanity_function, variable

MACHINERY = r"^pipeline one_f_one_b x 1: ([\d.]+) us, .* ratio ([\d.]+)"
RATE = r"tokens/s=(\d+(?:\.\d+)?)"


class InstalledCheck(rfm.RunOnlyRegressionTest):
    """What the checks have in common: the Python that has mpipipe, and one thread for each rank."""

    python = variable(str, value=sys.executable)
    valid_systems = ["*"]
    valid_prog_environs = ["*"]
    time_limit = "10m"
    maintainers = ["mpipipe"]
    env_vars = {"OMP_NUM_THREADS": 1}

    @run_after("init")
    def take_the_interpreter(self):
        """Start the Python that was chosen on the command line of ReFrame, where one was."""
        self.executable = self.python


@rfm.simple_test
class TrainingCheck(InstalledCheck):
    """A byte-level GPT on the text that Python brings along, each rank a stage of the pipeline."""

    descr = "mpipipe train: the loss falls, and all ranks end well"
    ranks = parameter([2, 4])
    steps = variable(int, value=20)

    @run_after("init")
    def train(self):
        """Ask for the training, small enough for any node."""
        self.num_tasks = self.ranks
        options = ["--pipe", self.ranks, "--steps", self.steps, "--sample-bytes", 0, "--out", "run"]
        self.executable_opts = ["-m", "mpipipe", "train", *map(str, options)]

    @sanity_function
    def ends_well(self):
        """Look for the last line of a training that ended, with a loss far below that of the first step."""
        return sn.all([
            sn.assert_found(rf"^mpipipe: ok steps={self.steps} ", self.stdout),
            sn.assert_found(rf"^mpipipe: {self.ranks} ranks = pipe {self.ranks} x ", self.stdout),
            sn.assert_lt(sn.extractsingle(r"^mpipipe: ok .*loss=([\d.]+)", self.stdout, 1, float), 5.0),
        ])  # fmt: skip

    @performance_function("tokens/s")
    def tokens_per_second(self):
        """Tokens per second of all ranks together, without the first step."""
        return sn.extractsingle(RATE, self.stdout, 1, float)


@rfm.simple_test
class MachineryCheck(InstalledCheck):
    """What the pipeline costs beside messages of bare mpi4py: a number that depends on the MPI and on the binding."""

    descr = "mpipipe bench pipeline: tiny stages, against bare mpi4py"
    num_tasks = 2

    @run_after("init")
    def measure(self):
        """Ask for few repetitions, which take seconds."""
        self.executable_opts = ["-m", "mpipipe", "bench", "pipeline", "--repeats", "3"]

    @sanity_function
    def measures(self):
        """Look for the line of the one-forward-one-backward schedule."""
        return sn.assert_found(MACHINERY, self.stdout)

    @performance_function("us")
    def per_microbatch(self):
        """Microseconds for each micro-batch, by mpipipe."""
        return sn.extractsingle(MACHINERY, self.stdout, 1, float)

    @performance_function("ratio")
    def beside_bare_mpi4py(self):
        """How many times as long as by hand; less is better."""
        return sn.extractsingle(MACHINERY, self.stdout, 2, float)
