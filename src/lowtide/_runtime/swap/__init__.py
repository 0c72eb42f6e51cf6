"""Swapping: the tiers below the device, saved tensors and optimizer state that go there and back.

Rules, whatever a plan says and the program does:

1. A storage leaves the device only while nobody but lowtide can reach it, so nobody can change
   or read it there; its copy is what it was.
2. Its bytes are free only after whatever computes next waits for the copy out.
3. Whoever asks for it gets it whole: what computes next waits for the copy back.
4. Bytes of a tier are given to another only after every copy to or from them has been waited for.
5. No room below, or a copy that fails: it stays on the device.
"""
