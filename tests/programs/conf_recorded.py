import os, time
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    if os.environ["RANK"] == "0":
        raise KeyError("recorded error")
    time.sleep(1000)

main()
