"""What TorchX's command line shows of a job's lines.

`live_lines` paints what people read and draws progress bars below it, `alike_warnings` leaves out what several replicas
warn of alike.
"""
