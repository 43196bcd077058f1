"""The order of writes: buffered text, raw writes, children."""

import os
import subprocess
import sys

print("one")
os.write(1, b"two\n")
print("three", file=sys.stderr)
os.write(2, b"four\n")
sys.stdout.buffer.write(b"five \xff\n")
sys.stdout.flush()
subprocess.run([sys.executable, "-c", "print('six')"], check=True)
pid = os.fork()
if pid == 0:
    print("seven")
    sys.exit(0)
os.waitpid(pid, 0)
print(input("a question? ") if len(sys.argv) > 1 else "eight")
print("nine, unterminated", end="")
