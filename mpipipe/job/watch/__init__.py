"""The watchdog: finds that no rank makes progress any more, and says which rank is to blame.

watchdog     one on each rank: counts time without progress, asks the others, ends the job; which ranks watch each other
channel      their messages, what one rank tells of itself (a dump), and what the system says of a process on this host
verdict      what all dumps together mean, as text
"""
