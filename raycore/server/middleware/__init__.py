"""What happens around every request, before its endpoint has it."""
