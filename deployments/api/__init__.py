"""The OpenAI-compatible HTTP edge, without Ray: JSON in, `GenerationRequest`s out, events back into answers.

`build_application` (application.py) is the entry. One request: body.py reads and checks the JSON, schemas.py
says what fields exist, validate.py makes the plan (prompts.py the tokens, spans.py their parts, recipes.py the
recipe), pump.py runs the backend's streams, chat.py and completions.py word the answer, exchange.py sends it.
"""
