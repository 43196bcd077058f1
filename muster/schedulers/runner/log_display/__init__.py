"""What TorchX's command line shows of a job's lines.

`live_lines` decides which part of the program prints them. `job_console` prints them to a terminal: with colours, alike
ones once, progress bars below. It can be used without TorchX.
"""
