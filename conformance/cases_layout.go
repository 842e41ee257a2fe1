package conformance

import (
	"bytes"

	"github.com/kvport/kvport/connector"
)

func layoutCases() []Case {
	return []Case{
		storeCase("strided-bytes", "LAYOUT-01", "Blocks go where offset and stride say, in three layouts.", stridedBytes),
		storeCase("guard-bytes", "LAYOUT-02", "Bytes between blocks and segments stay what they are.", guardBytes),
		storeCase("digest-span", "LAYOUT-03", "The digest segment comes back with its block.", digestSpan),
	}
}

func stridedBytes(r *rig) {
	for _, layout := range []connector.Layout{interleaved(slots), planes(slots), dense(slots)} {
		e := r.engine(setup{layout: &layout, shape: layout.Name})
		keys := e.keys(4)
		e.save(blocks(3, keys...)...)
		e.wipe(0, blocks(3, keys...)...)
		// Another order and other slots than those they were saved from.
		to := []connector.Block{{Key: keys[2], ID: 20}, {Key: keys[0], ID: 1}, {Key: keys[3], ID: 23}, {Key: keys[1], ID: 0}}
		r.must(e.load(to...), "load in layout %s", layout.Name)
		e.holds(to...)
		e.end()
	}
}

func guardBytes(r *rig) {
	for _, layout := range []connector.Layout{interleaved(slots), planes(slots)} {
		e := r.engine(setup{layout: &layout, shape: layout.Name})
		// Everything that is a block becomes zero; what is not stays guardByte.
		all := make([]connector.Block, slots)
		for i := range all {
			all[i].ID = connector.BlockID(i)
		}
		e.wipe(0, all...)
		guards := e.memory()
		keys := e.keys(slots / 2)
		e.save(blocks(0, keys...)...)
		r.must(e.load(blocks(slots/2, keys...)...), "load")
		e.wipe(0, all...)
		for rank, mem := range e.inst.Memory {
			if i := firstDifference(guards[rank], mem); i >= 0 {
				r.Errorf("layout %s: byte %d of the region lies in no block and was changed", layout.Name, i)
			}
		}
		e.end()
	}
}

// firstDifference is the first index at which two slices of one length differ, or -1.
func firstDifference(a, b []byte) int {
	if bytes.Equal(a, b) {
		return -1
	}
	for i := range a {
		if a[i] != b[i] {
			return i
		}
	}
	return -1
}

func digestSpan(r *rig) {
	e := r.engine(setup{})
	keys := e.keys(2)
	e.save(blocks(0, keys...)...)
	to := blocks(6, keys...)
	e.wipe(0, to...)
	r.must(e.load(to...), "load")
	for _, b := range to {
		for _, s := range e.kv[0].Segments(0) {
			if e.env.Layout.Segments[s].Layer != connector.DigestLayer {
				continue
			}
			if at := firstDifference(e.kv[0].View(s, b.ID-6), e.kv[0].View(s, b.ID)); at >= 0 {
				r.Errorf("block %d: byte %d of the digest is not what was saved", b.ID, at)
			}
		}
	}
}
