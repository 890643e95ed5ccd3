"""Pictures of schedules in time: for the terminal, for a browser, as a file, and for trace viewers.

The methods of `Schedule` with these names call what is here: the core knows nothing of colours and libraries that draw.
"""
