"""Embeddings and scores from a server of a model that pools."""

import base64
import json
import math
import struct
import urllib.request

from servers import serving


def post(url, **body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


with serving("--runner", "pooling", "--convert", "embed") as (url, client):
    found = client.embeddings.create(model="demo", input=["27 + 58 =", "11 + 12 ="], encoding_format="float")
    first = found.data[0].embedding
    assert len(first) == 128
    assert math.isclose(sum(each * each for each in first), 1, abs_tol=1e-3)
    encoded = post(f"{url}/v1/embeddings", model="demo", input="27 + 58 =", encoding_format="base64")
    decoded = struct.unpack("<128f", base64.b64decode(encoded["data"][0]["embedding"]))
    assert all(abs(a - b) < 1e-3 for a, b in zip(decoded, first, strict=True))
    scores = post(f"{url}/score", model="demo", text_1="27 + 58 =", text_2=["27 + 58 =", "99 - 12 ="])["data"]
    assert math.isclose(scores[0]["score"], 1, abs_tol=1e-2)
    assert scores[0]["score"] > scores[1]["score"]
    ranked = post(f"{url}/rerank", model="demo", query="27 + 58 =", documents=["99 - 12 =", "27 + 58 ="])["results"]
    assert ranked[0]["index"] == 1
    assert ranked[0]["document"]["text"] == "27 + 58 ="
    pooled = post(f"{url}/pooling", model="demo", input="27 + 58 =", task="embed")
    assert len(pooled["data"][0]["data"]) == 128
