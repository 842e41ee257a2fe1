package mac

import (
	"encoding/binary"
	"slices"
)

// The reference is written from the pseudocode of RFC 10032 and of FIPS 197, with their names, byte by byte, and shares nothing with
// the package that it checks. The S-box comes from its definition.

type refBlock = [16]byte

// refAES is one round function with its S-box.
type refAES struct {
	sbox, double [256]byte // double is xtime of the S-box
}

func newRefAES() *refAES {
	a := &refAES{}
	for x := range 256 {
		inverse := byte(0)
		for y := range 256 {
			if refTimes(byte(x), byte(y)) == 1 {
				inverse = byte(y)
			}
		}
		for bit := range 8 { // FIPS 197, equation 5.2
			b := inverse>>bit ^ inverse>>((bit+4)%8) ^ inverse>>((bit+5)%8) ^ inverse>>((bit+6)%8) ^ inverse>>((bit+7)%8) ^ 0x63>>bit
			a.sbox[x] |= b & 1 << bit
		}
		a.double[x] = refXtime(a.sbox[x])
	}
	return a
}

// refTimes multiplies in GF(2^8).
func refTimes(a, b byte) (product byte) {
	for ; b > 0; b >>= 1 {
		if b&1 == 1 {
			product ^= a
		}
		a = refXtime(a)
	}
	return product
}

func refXtime(a byte) byte {
	if a&0x80 != 0 {
		return a<<1 ^ 0x1b
	}
	return a << 1
}

// AESRound is SubBytes, ShiftRows, MixColumns and AddRoundKey.
func (a *refAES) AESRound(in, rk refBlock) (out refBlock) {
	for c := range 4 {
		var s, double [4]byte
		for r := range 4 {
			x := in[4*((c+r)%4)+r]
			s[r], double[r] = a.sbox[x], a.double[x]
		}
		for r := range 4 {
			out[4*c+r] = double[r] ^ double[(r+1)%4] ^ s[(r+1)%4] ^ s[(r+2)%4] ^ s[(r+3)%4] ^ rk[4*c+r]
		}
	}
	return out
}

func refXOR(blocks ...refBlock) (sum refBlock) {
	for i := range blocks {
		for j := range sum {
			sum[j] ^= blocks[i][j]
		}
	}
	return sum
}

// refLE64 is LE64(a) || LE64(b).
func refLE64(a, b uint64) (out refBlock) {
	binary.LittleEndian.PutUint64(out[:8], a)
	binary.LittleEndian.PutUint64(out[8:], b)
	return out
}

// refAEGIS is AEGIS-128X of degree D; of degree 1 it is AEGIS-128L.
type refAEGIS struct {
	*refAES
	D int
	V [][8]refBlock // by state, then by block
}

// Update absorbs block i of M0 and of M1 into state i.
func (g *refAEGIS) Update(m0, m1 []refBlock) {
	for i := range g.D {
		s := &g.V[i]
		*s = [8]refBlock{
			g.AESRound(s[7], refXOR(s[0], m0[i])), g.AESRound(s[0], s[1]), g.AESRound(s[1], s[2]), g.AESRound(s[2], s[3]),
			g.AESRound(s[3], refXOR(s[4], m1[i])), g.AESRound(s[4], s[5]), g.AESRound(s[5], s[6]), g.AESRound(s[6], s[7]),
		}
	}
}

func (g *refAEGIS) Init(key, nonce refBlock) {
	c0 := refBlock{0x00, 0x01, 0x01, 0x02, 0x03, 0x05, 0x08, 0x0d, 0x15, 0x22, 0x37, 0x59, 0x90, 0xe9, 0x79, 0x62}
	c1 := refBlock{0xdb, 0x3d, 0x18, 0x55, 0x6d, 0xc2, 0x2f, 0xf1, 0x20, 0x11, 0x31, 0x42, 0x73, 0xb5, 0x28, 0xdd}
	g.V = nil
	var nonceV, keyV []refBlock
	for range g.D {
		kn := refXOR(key, nonce)
		g.V = append(g.V, [8]refBlock{kn, c1, c0, c1, kn, refXOR(key, c0), refXOR(key, c1), refXOR(key, c0)})
		nonceV, keyV = append(nonceV, nonce), append(keyV, key)
	}
	for range 10 {
		for i := range g.D {
			ctx := refBlock{byte(i), byte(g.D - 1)}
			if g.D == 1 {
				ctx = refBlock{} // AEGIS-128L has none
			}
			g.V[i][3], g.V[i][7] = refXOR(g.V[i][3], ctx), refXOR(g.V[i][7], ctx)
		}
		g.Update(nonceV, keyV)
	}
}

func (g *refAEGIS) Absorb(ai []byte) {
	var t []refBlock
	for part := range slices.Chunk(ai, 16) {
		t = append(t, refBlock(part))
	}
	g.Update(t[:g.D], t[g.D:])
}

// tag128 is the tag of one state.
func (g *refAEGIS) tag128(i int) refBlock { return refXOR(g.V[i][:7]...) }

func (g *refAEGIS) FinalizeMac(dataLenBits uint64) (tags []refBlock, tag refBlock) {
	u := refLE64(dataLenBits, 128)
	var t []refBlock
	for i := range g.D {
		t = append(t, refXOR(g.V[i][2], u))
	}
	for range 7 {
		g.Update(t, t)
	}
	for i := range g.D {
		tags = append(tags, g.tag128(i))
	}
	if g.D > 1 {
		pad := make([]refBlock, g.D-1)
		for v := range slices.Chunk(tags, 2) {
			g.Update(append([]refBlock{v[0]}, pad...), append([]refBlock{v[1]}, pad...))
		}
		t = append([]refBlock{refXOR(g.V[0][2], refLE64(uint64(g.D), 128))}, pad...)
		for range 7 {
			g.Update(t, t)
		}
	}
	return tags, g.tag128(0)
}

// Mac also gives the tags of the states, which the RFC's vectors have.
func (g *refAEGIS) Mac(data []byte, key, nonce refBlock) (tags []refBlock, tag refBlock) {
	g.Init(key, nonce)
	rate := 32 * g.D
	padded := append(slices.Clone(data), make([]byte, (rate-len(data)%rate)%rate)...)
	for di := range slices.Chunk(padded, rate) {
		g.Absorb(di)
	}
	return g.FinalizeMac(8 * uint64(len(data)))
}

// refMessage is the message of a context and data, as Begin's comment has it.
func refMessage(context, data []byte) []byte {
	header := binary.LittleEndian.AppendUint64(nil, uint64(len(context)))
	header = append(header, context...)
	for len(header)%64 != 0 {
		header = append(header, 0)
	}
	return append(header, data...)
}
