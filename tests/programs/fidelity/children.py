"""multiprocessing from inside a worker: all three ways, with classes of this file."""

import multiprocessing
import os
import pickle
import sys


class Thing:
    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return type(self) is type(other) and self.value == other.value


def work(thing, queue):
    queue.put((thing, __name__, multiprocessing.current_process().name, multiprocessing.parent_process().pid))


def double(thing):
    return Thing(thing.value * 2)


def main():
    assert pickle.loads(pickle.dumps(Thing(1))) == Thing(1)
    print("pickled as", Thing.__module__)
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        child = context.Process(target=work, args=(Thing(2), queue))
        child.start()
        thing, name, child_name, parent = queue.get()
        child.join()
        print(method, thing == Thing(2), name, child_name, parent == os.getpid(), child.exitcode)
        with context.Pool(2) as pool:
            print(method, [thing.value for thing in pool.map(double, [Thing(3), Thing(4)])])
    print("default", multiprocessing.get_start_method(), multiprocessing.current_process().name)
    print("main", sys.modules["__main__"].__spec__ is None, multiprocessing.current_process().pid == os.getpid())
    print("authkey", len(multiprocessing.current_process().authkey))


if __name__ == "__main__":
    main()
