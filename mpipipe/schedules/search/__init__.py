"""The search for the fastest orders. One problem and one annealer serve all of it.

    problem         what is ordered: stages on ranks, micro-batches, times, memory; orders as tasks, and their replay
    orders          orders by rule: each rank decides when it is free, by queues or by priorities
    anneal          the annealer, and the search for the orders of a problem: priorities, blocks, the critical path
    blocks          a block of each micro-batch that repeats at even times
    search          `search`: a problem, or its repeated part where it has many micro-batches
    memory_limited  `search_with_recompute`: forwards that are run again to keep a limit of memory
    exact           `optimum`: small problems by constraint programming

The names that users call are those of `mpipipe.schedules`.
"""
