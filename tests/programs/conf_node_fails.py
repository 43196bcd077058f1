import os, sys, time

group, attempt = os.environ["GROUP_RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
os.write(1, f"group {group} attempt {attempt}\n".encode())
if attempt == "0":
    if group == "1":
        sys.exit(3)
    time.sleep(1000)
