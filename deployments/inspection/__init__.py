"""`kvtide inspect`: what a recipe keeps of a text, as a picture. `run` computes, `page` and `picture` draw."""
