"""Control-plane messages between prefill, node and router: types, framing and the protocol version."""
