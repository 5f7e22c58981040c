"""The watchdog: finds that no rank makes progress any more, and says which rank is to blame.

watchdog     one on each rank: counts time without progress, asks the others, ends the job
channel      their messages, and what a rank, or the system, says of a process
verdict      what all dumps together mean, as text
"""
