"""N: fails in the attempts before the Nth, with rank 0's address and count on stdout."""
import os, sys

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if os.environ["RANK"] == "0":
    print("attempt", attempt, os.environ["MASTER_PORT"], os.environ["WORLD_SIZE"], flush=True)
    if attempt < int(sys.argv[1]):
        sys.exit(5)
