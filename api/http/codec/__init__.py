"""Between bytes and arrays: request bodies, decoding images, encoding masks, responses."""
