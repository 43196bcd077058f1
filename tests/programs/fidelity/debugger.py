import pdb

value = 41
pdb.set_trace()
value += 1
print("value", value)
