WORD = "inner"
