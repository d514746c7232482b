"""OpenAI's completions and chats. What chats share with other dialects is in `raycore.server.chat`."""
