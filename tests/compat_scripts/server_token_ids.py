"""Token ids in the answers of a server."""

from servers import serving

with serving() as (url, client):
    completion = client.completions.create(
        model="demo", prompt="27 + 58 =", max_tokens=8, temperature=0, extra_body={"return_token_ids": True}
    )
    choice = completion.choices[0]
    assert len(choice.token_ids) == completion.usage.completion_tokens
    assert len(choice.prompt_token_ids) == completion.usage.prompt_tokens
    again = client.completions.create(model="demo", prompt=choice.prompt_token_ids, max_tokens=8, temperature=0)
    assert again.choices[0].text == choice.text
