import os

os.write(1, b"begin \xff\xfe\x00 end\n" + b"x" * 300_000 + b"|\n")
