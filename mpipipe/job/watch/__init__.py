"""The watchdog: finds that no rank makes progress any more, and says which rank is to blame.

watchdog     one on each rank: counts time without progress, asks the others, ends the job
channel      their messages, on a communicator of their own
neighbours   what the system says of a process on this host that does not answer
dump         what one rank tells of itself
verdict      what all dumps together mean, as text
"""
