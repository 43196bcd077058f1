print("package imported", __name__, __spec__.name)
