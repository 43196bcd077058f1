import sys

print("module", __name__, sys.argv[1:])
