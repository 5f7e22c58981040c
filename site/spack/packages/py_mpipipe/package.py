# A package of Spack 1.0 or later. No release is on a server yet, so there is no `url` and no checksum: it is installed
# from a checkout, whose folder you name.
#
#   spack repo add site/spack
#   spack install py-mpipipe@main dev_path=/path/to/checkout ^openmpi
#
# `depends_on("mpi")` comes with py-mpi4py, which is built with the mpicc of the MPI that you choose, also of an external one.
from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyMpipipe(PythonPackage):
    """Pipeline parallelism and ring attention over MPI, on plain arrays: numpy on CPUs, CuPy on GPUs."""

    license("BSD-3-Clause")

    version("main")

    variant("cuda", default=False, description="GPUs of NVIDIA, by CuPy")
    variant("tokens", default=False, description="tokenizers, for `mpipipe tokenize`")
    variant("plot", default=False, description="pictures, by matplotlib")

    depends_on("py-setuptools@77:", type="build")

    with default_args(type=("build", "run")):
        depends_on("python@3.10:")
        depends_on("py-numpy@2:")
        depends_on("py-mpi4py@4.1:")
        depends_on("py-ml-dtypes")
        depends_on("py-threadpoolctl")
        depends_on("py-typer")
        depends_on("py-rich")
        depends_on("py-safetensors")
        depends_on("py-tomli", when="^python@:3.10")
        depends_on("py-cupy@14: +all", when="+cuda")
        depends_on("py-tokenizers@0.20:", when="+tokens")
        depends_on("py-matplotlib@3.8:", when="+plot")
