package mac

import (
	"encoding/binary"
	"math/bits"
)

// The portable implementation has no tables, whose lines in the cache would tell an observer what was looked up. It computes four
// blocks of AES at a time on planes, one for each bit of a byte, with the circuit of the S-box by Boyar and Peralta.

// planes are four blocks: bit 16*row + 4*column + b of plane i is bit i of the byte of block b in that row and column of AES's square.
type planes [8]uint64

// everyOther are the bits of blocks 0 and 2.
const everyOther = 0x5555555555555555

// absorbPortable updates the state with n blocks of the message, which lie stride bytes apart.
//
// Group k has rows k and k+4 of both lanes. So one round of AES takes group k to the next one, and that of the last group,
// whose rows change places, to the first one, which also gets the whole block of the message.
func absorbPortable(s *state, p []byte, n, stride, lanes int) {
	var groups [rows / 2]planes
	for k := range groups {
		groups[k].pack(&s[k][0], &s[k+4][0], &s[k][1], &s[k+4][1])
	}
	for range n {
		var message planes
		block := func(i int) *[blockSize]byte { return (*[blockSize]byte)(p[blockSize*i:]) }
		message.pack(block(0), block(lanes), block(lanes-1), block(2*lanes-1)) // with one lane the other does not matter
		last := groups[3]
		last.round()
		for k := 3; k > 0; k-- {
			before := groups[k-1]
			before.round()
			for i := range before {
				groups[k][i] ^= before[i]
			}
		}
		for i, x := range last {
			groups[0][i] ^= message[i] ^ x>>1&everyOther ^ x&everyOther<<1
		}
		p = p[min(stride, len(p)):]
	}
	for k := range groups {
		groups[k].unpack(&s[k][0], &s[k+4][0], &s[k][1], &s[k+4][1])
	}
}

// pack sets the planes to four blocks.
func (q *planes) pack(blocks ...*[blockSize]byte) {
	for b, block := range blocks {
		low, high := binary.LittleEndian.Uint64(block[:]), binary.LittleEndian.Uint64(block[8:])
		q[b] = spread(low) | spread(high)<<8
		q[b+4] = spread(low>>32) | spread(high>>32)<<8
	}
	q.transpose()
}

// unpack is the inverse of pack.
func (q *planes) unpack(blocks ...*[blockSize]byte) {
	q.transpose()
	for b, block := range blocks {
		binary.LittleEndian.PutUint64(block[:], even(q[b])|even(q[b+4])<<32)
		binary.LittleEndian.PutUint64(block[8:], even(q[b]>>8)|even(q[b+4]>>8)<<32)
	}
}

// spread makes the four low bytes of a word its bytes 0, 2, 4 and 6.
func spread(x uint64) uint64 {
	x &= 0x00000000ffffffff
	x = (x | x<<16) & 0x0000ffff0000ffff
	return (x | x<<8) & 0x00ff00ff00ff00ff
}

// even is the inverse of spread.
func even(x uint64) uint64 {
	x &= 0x00ff00ff00ff00ff
	x = (x | x>>8) & 0x0000ffff0000ffff
	return (x | x>>16) & 0x00000000ffffffff
}

// transpose makes bit i of word w bit w of word i, in each of the eight bytes.
func (q *planes) transpose() {
	for i := 0; i < 8; i += 2 {
		q[i], q[i+1] = exchange(q[i], q[i+1], everyOther, 1)
	}
	for _, i := range [...]int{0, 1, 4, 5} {
		q[i], q[i+2] = exchange(q[i], q[i+2], 0x3333333333333333, 2)
	}
	for i := range 4 {
		q[i], q[i+4] = exchange(q[i], q[i+4], 0x0f0f0f0f0f0f0f0f, 4)
	}
}

// exchange has the bits of a outside the mask change places with those of b within it.
func exchange(a, b, mask uint64, distance uint) (uint64, uint64) {
	return a&mask | b&mask<<distance, a>>distance&mask | b&^mask
}

// round is a round of AES without a round key.
func (q *planes) round() {
	q.subBytes()
	var sums planes // of a byte and the one below it in its column
	for i, x := range q {
		x = uint64(uint16(x)) | turn(x>>16, 1)<<16 | turn(x>>32, 2)<<32 | turn(x>>48, 3)<<48
		below := bits.RotateLeft64(x, -16)
		sums[i] = x ^ below
		q[i] = below ^ bits.RotateLeft64(sums[i], 32)
	}
	// Doubling a byte moves its bits up by one; the highest comes back as 0x1b.
	top := sums[7]
	q[0] ^= top
	q[1] ^= sums[0] ^ top
	q[2] ^= sums[1]
	q[3] ^= sums[2] ^ top
	q[4] ^= sums[3] ^ top
	q[5] ^= sums[4]
	q[6] ^= sums[5]
	q[7] ^= sums[6]
}

// turn moves the bytes of the lowest row to the left by some columns.
func turn(x uint64, columns int) uint64 { return uint64(bits.RotateLeft16(uint16(x), -4*columns)) }

// subBytes is the S-box: the circuit of 113 gates with depth 27 of Boyar and Peralta, "A new combinational logic minimization
// technique with applications to cryptology" (2010), with its names. Its x0 is the highest bit.
func (q *planes) subBytes() {
	x7, x6, x5, x4, x3, x2, x1, x0 := q[0], q[1], q[2], q[3], q[4], q[5], q[6], q[7]

	y14, y13, y9, y8, t0 := x3^x5, x0^x6, x0^x3, x0^x5, x1^x2
	y1, y12 := t0^x7, y13^y14
	y4, y2, y5, t1 := y1^x3, y1^x0, y1^x6, x4^y12
	y3, y15, y20 := y5^y8, t1^x5, t1^x1
	y6, y10, y11 := y15^x7, y15^t0, y20^y9
	y7, y17, y19, y16 := x7^y11, y10^y11, y10^y8, t0^y11
	y21, y18 := y13^y16, x0^y16

	t2, t7, t12 := y12&y15, y13&y16, y9&y11
	t4, t6 := y3&y6^t2, y4&x7^t2
	t9, t11 := y5&y1^t7, y2&y7^t7
	t14, t16 := y14&y17^t12, y8&y10^t12
	t21, t22, t23, t24 := t4^t14^y20, t6^t16^y19, t9^t14^y21, t11^t16^y18

	t25, t26 := t21^t22, t21&t23
	t27, t30, t31 := t24^t26, t23^t24, t22^t26
	t29, t33 := t25&t27^t22, t31&t30^t24
	t34, t35 := t23^t33, t27^t33
	t36 := t24 & t35
	t37, t38 := t36^t34, t27^t36
	t40 := t25 ^ t29&t38
	t41, t42, t43, t44 := t40^t37, t29^t33, t29^t40, t33^t37
	t45 := t42 ^ t41

	z0, z1, z2, z3, z4, z5 := t44&y15, t37&y6, t33&x7, t43&y16, t40&y1, t29&y7
	z6, z7, z8, z9, z10, z11 := t42&y11, t45&y17, t41&y10, t44&y12, t37&y3, t33&y4
	z12, z13, z14, z15, z16, z17 := t43&y13, t40&y5, t29&y2, t42&y9, t45&y14, t41&y8

	t46, t47, t48, t49, t50, t51 := z15^z16, z10^z11, z5^z13, z9^z10, z2^z12, z2^z5
	t52, t53, t54, t55 := z7^z8, z0^z3, z6^z7, z16^z17
	t56, t57, t58, t59 := z12^t48, t50^t53, z4^t46, z3^t54
	t60, t61, t62, t63, t64 := t46^t57, z14^t57, t52^t58, t49^t58, z4^t59
	t65, t66 := t61^t62, z1^t63
	t67, s3 := t64^t65, t53^t66

	q[7], q[6], q[5], q[4] = t59^t63, ^(t64 ^ s3), ^(t55 ^ t67), s3
	q[3], q[2], q[1], q[0] = t51^t66, t47^t65, ^(t56 ^ t62), ^(t48 ^ t60)
}
