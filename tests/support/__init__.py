"""What the tests share; each module's head says what is in it.

running     harness (collective pytest), watchdog (deadlines), launch (jobs of their own), mpi_stand_in (in place of
            pytest-mpi), processors (for jobs/test_processors.sh)
models      dense (tanh layers, and their gradients in numpy), reference_gpt (the GPT in numpy), small_gpt (the GPT of
            the package through a pipeline)
attention   reference_attention (on whole matrices), rings (through a ring of ranks), device_attention (on a device)
checks      tolerance and training_tolerance (how far rounding may move a result), gradcheck (finite differences),
            public_face (what docstrings must cover)
"""
