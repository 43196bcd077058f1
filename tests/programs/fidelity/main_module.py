import sys

names = list(globals())
main = sys.modules["__main__"]
print("names", names)
print("same module", vars(main) is globals(), type(main).__name__)
for key in ("__name__", "__file__", "__spec__", "__package__", "__cached__", "__doc__", "__annotations__"):
    print(key, repr(globals().get(key, "absent")).split(" at 0x")[0])
print("builtins", type(__builtins__).__name__, type(__loader__).__name__, getattr(__loader__, "path", None))
print("loader name", getattr(__loader__, "name", None))
print("argv", sys.argv)
print("path", sys.path)
print("orig_argv", sys.orig_argv)
print("executable", sys.executable, sys.prefix, sys.exec_prefix)
print("flags", sys.flags)
print("options", sys.warnoptions, sys._xoptions)
with open("/proc/self/cmdline", "rb") as file:
    print("cmdline", file.read().rstrip(b"\0").split(b"\0"))
with open("/proc/self/comm") as file:
    print("comm", file.read().strip())
import warnings

print("filters", warnings.filters)
print("hooks", sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__, sys.gettrace(), sys.getprofile())
import inspect

print("source", inspect.getsource(main).splitlines()[:1], inspect.getmodule(inspect.currentframe()) is main)
