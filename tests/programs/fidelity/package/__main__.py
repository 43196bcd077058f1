from package import inner

print(__name__, __package__, __spec__.name, inner.WORD)
exec(open(__file__.replace("package/__main__", "main_module")).read().replace("inspect.getsource(main).splitlines()[:1]", "0"))
