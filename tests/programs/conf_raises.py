"""Global rank N raises; the others wait."""
import os, sys, time

def inner():
    raise ValueError("the very error")

if os.environ["RANK"] == sys.argv[1]:
    inner()
time.sleep(1000)
