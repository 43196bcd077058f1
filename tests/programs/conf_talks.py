import os, sys

rank = os.environ["LOCAL_RANK"]
for index in range(3):
    print(f"out {rank} line {index} apple,pear" if index == 1 else f"out {rank} line {index}")
sys.stdout.flush()
print(f"err {rank} line 0 plum", file=sys.stderr)
sys.stdout.write(f"out {rank} unterminated")
