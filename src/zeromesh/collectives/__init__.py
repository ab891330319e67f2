"""Ways to carry out collectives over several levels: one module or folder each, and its line in
`zeromesh.strategy.collective.HOMES`."""
