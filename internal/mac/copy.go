package mac

// Stores says how Copy writes.
type Stores uint8

// The ways to write.
const (
	Cached      Stores = iota // through the caches, where whoever reads next finds the bytes
	NonTemporal               // past the caches, if the machine can and the address is aligned
)

// String is for messages.
func (s Stores) String() string { return [...]string{"cached", "non-temporal"}[s] }

// pieceSize is the size of the private buffer used where one register cannot serve both the code and the copy. It was faster than 256
// bytes and 4 KiB.
const pieceSize = 1 << 10

// Copy is Add of src, which it also writes to the beginning of dst; dst must be as long, and the two must not overlap. What is added is
// what is written, also if others change src or dst meanwhile: bytes are fetched once, and both come from what was fetched. A later store
// by the caller is not seen before the copy (on amd64; elsewhere it must be a synchronizing one).
func (h *Hash) Copy(dst, src []byte, stores Stores) {
	dst = dst[:len(src):len(dst)]
	h.length += uint64(len(src))
	rate := h.rate()
	if h.filled > 0 {
		n := copy(h.buf[h.filled:rate], src)
		copy(dst, h.buf[h.filled:h.filled+n])
		h.filled += n
		dst, src = dst[n:], src[n:]
		if h.filled < rate {
			return
		}
		h.absorb(&h.state, h.buf[:rate], 1, 0)
	}
	if n := len(src) / rate; n > 0 {
		h.copy(&h.state, dst, src, n, stores)
		dst, src = dst[n*rate:], src[n*rate:]
	}
	h.filled = copy(h.buf[:], src)
	copy(dst, h.buf[:h.filled])
}

// copyPortable updates the state with a message of whole blocks, and writes it to dst.
func (c core) copyPortable(s *state, dst, src []byte) {
	var piece [pieceSize]byte
	for len(src) > 0 {
		n := copy(piece[:], src)
		absorbPortable(s, piece[:n], n/c.rate(), c.rate(), c.lanes)
		copy(dst, piece[:n])
		dst, src = dst[n:], src[n:]
	}
}

// CopyPast copies src to dst, which must be as long, past the caches if the machine can and the address is aligned. The two must not overlap.
// It is what a copy that also digests is compared with.
func CopyPast(dst, src []byte) {
	dst = dst[:len(src):len(dst)]
	n := copyPast(dst, src)
	copy(dst[n:], src[n:])
}
