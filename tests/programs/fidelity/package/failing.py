def fail():
    raise ValueError("in a module")


fail()
