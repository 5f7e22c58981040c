"""python -m mpipipe.gpu_check, from the root of a checkout; jobs/gpu_check.sh sets its environment."""

import sys

from mpipipe.gpu_check.suite import main

sys.exit(main())
