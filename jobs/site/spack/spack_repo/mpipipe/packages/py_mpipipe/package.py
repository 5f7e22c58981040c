# A package of Spack 1.0 or later. No release is on a server yet, so there is neither a `url` nor a checksum: it is
# installed from a checkout, whose folder you name, in an environment of Spack.
#
#   spack repo add jobs/site/spack/spack_repo/mpipipe
#   spack add py-mpipipe@main ^openmpi
#   spack develop --path "$PWD" py-mpipipe@main
#   spack install
#
# MPI comes with py-mpi4py, which Spack builds with the compiler wrapper of the MPI that you choose, an external one,
# too.
from spack.package import *
from spack_repo.builtin.build_systems.python import PythonPackage


class PyMpipipe(PythonPackage):
    """Pipeline parallelism and ring attention over MPI, on plain arrays: numpy on CPUs, CuPy on GPUs."""

    license("BSD-3-Clause")

    version("main")

    variant("cuda", default=False, description="GPUs of NVIDIA, by CuPy")
    variant("tokens", default=False, description="tokenizers, for `mpipipe tokenize`")
    variant("plot", default=False, description="pictures, by matplotlib")

    depends_on("py-setuptools@77:", type="build")

    with default_args(type=("build", "run")):
        depends_on("python@3.11:")
        depends_on("py-numpy@2:")
        depends_on("py-mpi4py@4.1:")
        depends_on("py-ml-dtypes")
        depends_on("py-threadpoolctl")
        depends_on("py-safetensors")
        depends_on("py-cupy@14:14", when="+cuda")
        depends_on("py-tokenizers@0.20:", when="+tokens")
        depends_on("py-matplotlib@3.8:", when="+plot")
