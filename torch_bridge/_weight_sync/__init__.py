"""Weight sync: the weights of a sharded model as the tensors of a serving engine.

`qshard._files` has the formats of engines, which need no framework. Files of a whole model are written elsewhere.
"""
