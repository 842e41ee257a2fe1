package gguf

import (
	"encoding/binary"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// sample is a file with every kind of content that Writer can write.
func sample() *Writer {
	w := &Writer{}
	w.String("general.architecture", "llama")
	w.Uint32("llama.block_count", 30)
	w.Float32("llama.rope.freq_base", 1e5)
	w.Strings("tokenizer.ggml.tokens", []string{"a", "", "ccc"})
	w.Ints("tokenizer.ggml.token_type", []int32{1, -2, 3})
	w.Tensor("norm", F32, []int{3}, floatBytes(1, -2, 0.5))
	w.Tensor("wide", F16, []int{2, 3}, []byte{0, 0x3c, 0, 0xc0, 0, 0x7c, 1, 0, 0xff, 0x7b, 0, 0x80})
	return w
}

func floatBytes(v ...float32) (b []byte) {
	for _, f := range v {
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(f))
	}
	return b
}

func TestOpen(t *testing.T) {
	path := filepath.Join(t.TempDir(), "model.gguf")
	require.NoError(t, os.WriteFile(path, sample().Bytes(), 0o600))
	f, err := Open(path)
	require.NoError(t, err)
	require.Equal(t, []string{
		"general.architecture", "llama.block_count", "llama.rope.freq_base",
		"tokenizer.ggml.token_type", "tokenizer.ggml.tokens",
	}, f.Keys())
	s, err := f.String("general.architecture")
	require.NoError(t, err)
	require.Equal(t, "llama", s)
	n, err := f.Uint("llama.block_count")
	require.NoError(t, err)
	require.Equal(t, uint64(30), n)
	v, err := f.Float("llama.rope.freq_base")
	require.NoError(t, err)
	require.InDelta(t, 1e5, v, 0)
	list, err := f.Strings("tokenizer.ggml.tokens")
	require.NoError(t, err)
	require.Equal(t, []string{"a", "", "ccc"}, list)
	ints, err := f.Ints("tokenizer.ggml.token_type")
	require.NoError(t, err)
	require.Equal(t, []int32{1, -2, 3}, ints)

	wide, err := f.Tensor("wide")
	require.NoError(t, err)
	require.Equal(t, []int{3, 2}, []int{wide.Rows(), wide.Cols()})
	clone := wide.Clone()
	require.NoError(t, f.Close())
	require.NoError(t, f.Close())
	row := make([]float32, 2)
	clone.Row(row, 1)
	require.True(t, math.IsInf(float64(row[0]), 1))
	require.InDelta(t, math.Ldexp(1, -24), row[1], 0)
	clone.Row(row, 2)
	require.InDelta(t, 65504, row[0], 0)
	require.True(t, math.Signbit(float64(row[1])))
}

func TestGetters(t *testing.T) {
	f, err := Parse(sample().Bytes())
	require.NoError(t, err)
	for _, get := range []func(key string) error{
		func(key string) error { _, err := f.String(key); return err },
		func(key string) error { _, err := f.Uint(key); return err },
		func(key string) error { _, err := f.Float(key); return err },
		func(key string) error { _, err := f.Bool(key); return err },
		func(key string) error { _, err := f.Strings(key); return err },
		func(key string) error { _, err := f.Ints(key); return err },
	} {
		require.ErrorIs(t, get("absent"), ErrMissing)
		wrong := 0
		for _, key := range f.Keys() {
			if err := get(key); err != nil {
				require.ErrorIs(t, err, ErrFormat)
				require.ErrorContains(t, err, key)
				wrong++
			}
		}
		require.GreaterOrEqual(t, wrong, 4)
	}
	_, err = f.Tensor("absent")
	require.ErrorIs(t, err, ErrMissing)
	require.False(t, f.Has("absent"))
}

func TestIntegers(t *testing.T) {
	for k, c := range map[kind]struct {
		raw  []byte
		want int64
		ok   bool
	}{
		kindU8:   {[]byte{255}, 255, true},
		kindI8:   {[]byte{255}, -1, true},
		kindU16:  {[]byte{255, 255}, 65535, true},
		kindI16:  {[]byte{254, 255}, -2, true},
		kindU32:  {[]byte{255, 255, 255, 255}, math.MaxUint32, true},
		kindI32:  {[]byte{255, 255, 255, 255}, -1, true},
		kindI64:  {[]byte{255, 255, 255, 255, 255, 255, 255, 255}, -1, true},
		kindU64:  {[]byte{255, 255, 255, 255, 255, 255, 255, 255}, -1, false},
		kindF32:  {[]byte{0, 0, 0, 0}, 0, false},
		kindBool: {[]byte{1}, 0, false},
	} {
		got, ok := k.integer(c.raw)
		require.Equal(t, c.want, got, "kind %d", k)
		require.Equal(t, c.ok, ok, "kind %d", k)
	}
}

// TestRow checks the quantised types on blocks written by hand.
func TestRow(t *testing.T) {
	const scale, minimum = 0x3800, 0xbc00 // 0.5 and -1
	nibbles := make([]byte, 16)
	for i := range nibbles {
		nibbles[i] = byte(i) | byte(15-i)<<4
	}
	eights := []byte{0, 0x38}
	for i := range 32 {
		eights = append(eights, byte(int8(i*8-128)))
	}
	le := binary.LittleEndian
	q40 := append(le.AppendUint16(nil, scale), nibbles...)
	q41 := append(le.AppendUint16(le.AppendUint16(nil, scale), minimum), nibbles...)
	value := func(i int) (nibble float32) {
		if i < 16 {
			return float32(i)
		}
		return float32(31 - i)
	}
	for _, c := range []struct {
		kind Type
		raw  []byte
		want func(i int) float32
	}{
		{Q4_0, q40, func(i int) float32 { return (value(i) - 8) / 2 }},
		{Q4_1, q41, func(i int) float32 { return value(i)/2 - 1 }},
		{Q8_0, eights, func(i int) float32 { return float32(i*8-128) / 2 }},
	} {
		w := &Writer{}
		row := append(make([]byte, 2*len(c.raw)), append(c.raw, c.raw...)...) // a row of zeros, then ours
		w.Tensor("t", c.kind, []int{64, 2}, row)
		f, err := Parse(w.Bytes())
		require.NoError(t, err)
		tensor, err := f.Tensor("t")
		require.NoError(t, err)
		got := make([]float32, 64)
		tensor.Row(got, 1)
		for i, v := range got {
			require.InDelta(t, c.want(i%32), v, 0, "%s element %d", c.kind, i)
		}
		tensor.Row(got, 0)
		require.Zero(t, got[5])
		require.Len(t, tensor.Raw(), len(row))
	}
}

// refused is a file and what its error must say.
type refused struct {
	data []byte
	want string
}

func requireRefused(t *testing.T, cases map[string]refused) {
	t.Helper()
	for name, c := range cases {
		_, err := Parse(c.data)
		require.ErrorIs(t, err, ErrFormat, name)
		require.ErrorContains(t, err, c.want, name)
	}
}

// TestRefused: hostile and unsupported files give errors, not panics or allocations.
func TestRefusedMetadata(t *testing.T) {
	le := binary.LittleEndian
	head := func(version uint32, tensors, entries uint64) []byte {
		b := le.AppendUint32([]byte("GGUF"), version)
		return le.AppendUint64(le.AppendUint64(b, tensors), entries)
	}
	room := make([]byte, 100)
	entry := func(k kind, rest ...byte) []byte {
		b := append(le.AppendUint64(head(3, 0, 1), 1), 'k')
		return append(append(le.AppendUint32(b, uint32(k)), rest...), room...)
	}
	twice := &Writer{}
	twice.String("k", "a")
	twice.String("k", "b")
	odd := &Writer{}
	odd.Uint32("general.alignment", 24)
	kind := &Writer{}
	kind.String("general.alignment", "32")
	huge := le.AppendUint64(nil, 1<<62)
	requireRefused(t, map[string]refused{
		"empty":                {nil, "no GGUF magic"},
		"magic":                {append([]byte("GGML"), room...), "magic"},
		"version":              {append(head(2, 0, 0), room...), "version 2"},
		"big endian":           {append([]byte("GGUF\x00\x00\x00\x03"), room...), "version"},
		"many tensors":         {append(head(3, 1<<60, 0), room...), "tensors"},
		"many entries":         {append(head(3, 0, 1<<15), room...), "metadata entries"},
		"empty key":            {append(head(3, 0, 1), room...), "name of 0 bytes"},
		"long key":             {append(append(head(3, 0, 1), huge...), room...), "name of"},
		"unknown type":         {entry(99), "unknown type 99"},
		"string beyond":        {entry(kindString, huge...), "bytes wanted"},
		"array of arrays":      {entry(kindArray, append(le.AppendUint32(nil, uint32(kindArray)), huge...)...), "unsupported type 9"},
		"array overflow":       {entry(kindArray, append(le.AppendUint32(nil, uint32(kindU64)), huge...)...), "elements"},
		"array beyond":         {entry(kindArray, append(le.AppendUint32(nil, uint32(kindU32)), le.AppendUint64(nil, 1000)...)...), "bytes wanted"},
		"strings beyond":       {entry(kindArray, append(le.AppendUint32(nil, uint32(kindString)), huge...)...), "bytes wanted"},
		"key twice":            {twice.Bytes(), `"k" twice`},
		"alignment":            {odd.Bytes(), "general.alignment is 24"},
		"alignment type":       {kind.Bytes(), "general.alignment"},
		"cut in the metadata":  {sample().Bytes()[:60], "more than"},
		"cut in a description": {sample().Bytes()[:260], ""},
	})
	_, err := Open(filepath.Join(t.TempDir(), "absent"))
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = Open(t.TempDir())
	require.ErrorIs(t, err, ErrFormat)
}

// TestRefusedTensors: unsupported ones are named.
func TestRefusedTensors(t *testing.T) {
	tensor := func(kind Type, dims []int, bytes int) []byte {
		w := &Writer{}
		w.Tensor("blk.0.w", kind, dims, make([]byte, bytes))
		return w.Bytes()
	}
	twins := &Writer{}
	twins.Tensor("t", F32, []int{1}, make([]byte, 4))
	twins.Tensor("t", F32, []int{1}, make([]byte, 4))
	coarse := &Writer{}
	coarse.Uint32("general.alignment", 4096)
	coarse.Tensor("a", F32, []int{1}, make([]byte, 4))
	coarse.Tensor("b", F32, []int{1}, make([]byte, 8192))
	requireRefused(t, map[string]refused{
		"tensor twice":        {twins.Bytes(), `"t" twice`},
		"unsupported":         {tensor(12, []int{256}, 144), `"blk.0.w" has type Q4_K`},
		"unknown tensor type": {tensor(77, []int{256}, 144), "number 77"},
		"no dimensions":       {tensor(F32, nil, 4), "0 dimensions"},
		"five dimensions":     {tensor(F32, []int{1, 1, 1, 1, 1}, 4), "5 dimensions"},
		"zero dimension":      {tensor(F32, []int{4, 0}, 4), "impossible"},
		"overflow":            {tensor(F32, []int{1 << 40, 1 << 40}, 4), "impossible"},
		"broken block":        {tensor(Q4_1, []int{48}, 40), "multiple of 32"},
		"tensor beyond":       {tensor(F32, []int{1000}, 4), "beyond the file"},
		"misaligned":          {append(coarse.Bytes(), make([]byte, 8192)...), "not aligned to 4096"},
	})
}

// FuzzParse: any input gives a file whose values and tensors can all be read, or an error.
func FuzzParse(f *testing.F) {
	f.Add(sample().Bytes())
	w := &Writer{}
	for i, k := range []Type{Q4_0, Q4_1, Q8_0} {
		w.Tensor(k.String(), k, []int{32, i + 1}, make([]byte, 34*(i+1)))
	}
	w.Uint32("general.alignment", 32)
	f.Add(w.Bytes())
	f.Fuzz(func(t *testing.T, data []byte) {
		file, err := Parse(data)
		if err != nil {
			require.ErrorIs(t, err, ErrFormat)
			return
		}
		for _, key := range file.Keys() {
			_, _ = file.String(key)
			_, _ = file.Uint(key)
			_, _ = file.Float(key)
			_, _ = file.Bool(key)
			if list, err := file.Strings(key); err == nil {
				require.LessOrEqual(t, len(list), len(data)/8, "no more than the file holds")
			}
			if list, err := file.Ints(key); err == nil {
				require.LessOrEqual(t, len(list), len(data), "a number has a byte at least")
			}
			require.LessOrEqual(t, len(key), MaxName)
		}
		for _, tensor := range file.tensors {
			require.LessOrEqual(t, len(tensor.Raw()), len(data))
			require.LessOrEqual(t, tensor.Cols()*tensor.Rows(), 2*len(data), "two numbers a byte at most")
			row := make([]float32, tensor.Cols())
			tensor.Row(row, 0)
			tensor.Row(row, tensor.Rows()-1)
		}
	})
}
