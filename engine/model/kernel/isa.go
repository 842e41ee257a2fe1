package kernel

import (
	"fmt"
	"slices"
)

// ISA is an instruction set that the kernels are written for. All give the same bits.
type ISA uint8

// The instruction sets, the fastest first.
const (
	Auto     ISA = iota // the fastest that this machine and its operating system can run
	AVX512              // AVX-512F, with AVX2's
	AVX2                // AVX2, FMA and F16C
	Portable            // plain Go with exact FMA emulation: the reference, too slow to serve with
)

// String is the name of the instruction set, for logs.
func (i ISA) String() string {
	switch i {
	case Auto:
		return "auto"
	case AVX512:
		return "avx512"
	case AVX2:
		return "avx2"
	case Portable:
		return "portable"
	}
	return fmt.Sprintf("ISA(%d)", uint8(i))
}

// Supported lists what this machine can run, the fastest first. Portable is always the last.
func Supported() []ISA {
	var ids []ISA
	for _, k := range runnable() {
		ids = append(ids, k.id)
	}
	return ids
}

func runnable() []*isa { return append(native(), portable()) }

// choose gives the kernels for an instruction set.
func choose(id ISA) (*isa, error) {
	all := runnable()
	if id == Auto {
		return all[0], nil
	}
	i := slices.IndexFunc(all, func(k *isa) bool { return k.id == id })
	if i < 0 {
		return nil, fmt.Errorf("this machine cannot run %v kernels, only %v", id, Supported())
	}
	return all[i], nil
}
