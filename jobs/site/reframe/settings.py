"""Systems on which ReFrame runs checks.py: this machine, and an example of a cluster. Write your own."""

PREFIX = "results/reframe"  # of its folders and its report, below the working folder
ENVIRONMENT = {"name": "site", "features": ["mpi"]}  # add `modules` of your site
site_configuration = {
    "systems": [
        {
            "name": "here",
            "descr": "this machine, by the mpiexec on PATH",
            "hostnames": [".*"],
            "prefix": PREFIX,
            "partitions": [
                {
                    "name": "local",
                    "scheduler": "local",
                    "launcher": "mpiexec",
                    "environs": ["site"],
                    "max_jobs": 1,  # checks beside each other would slow each other down
                }
            ],
        },
        {
            "name": "cluster",
            "descr": "a cluster with SLURM; `access` is what sbatch needs there, and srun takes the plugin of its MPI",
            "hostnames": ["^login"],
            "prefix": PREFIX,
            "partitions": [
                {
                    "name": "cpu",
                    "scheduler": "squeue",
                    "launcher": "srun",
                    "access": [],
                    "environs": ["site"],
                    "max_jobs": 4,
                    "env_vars": [["SLURM_MPI_TYPE", "pmi2"]],
                }
            ],
        },
    ],
    "environments": [ENVIRONMENT],
    "general": [{"check_search_recursive": False, "report_file": f"{PREFIX}/report.json"}],
}
