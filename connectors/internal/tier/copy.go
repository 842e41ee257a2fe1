package tier

import (
	"sync"
	"sync/atomic"
)

// piece is one copy to make.
type piece struct{ dst, src []byte }

const (
	pieceBytes    = 256 << 10 // no piece is larger, so that workers end together
	parallelBytes = 512 << 10 // less is copied by the caller alone: starting a worker costs as much
)

// scatter appends the copies from a slot to the spans of an item.
func scatter(to []piece, spans [][]byte, slot []byte) []piece {
	for _, s := range spans {
		to = split(to, s, slot[:len(s)])
		slot = slot[len(s):]
	}
	return to
}

// gather appends the copies from the spans of an item to a slot.
func gather(to []piece, slot []byte, spans [][]byte) []piece {
	for _, s := range spans {
		to = split(to, slot[:len(s)], s)
		slot = slot[len(s):]
	}
	return to
}

func split(to []piece, dst, src []byte) []piece {
	for len(src) > pieceBytes {
		to = append(to, piece{dst[:pieceBytes], src[:pieceBytes]})
		dst, src = dst[pieceBytes:], src[pieceBytes:]
	}
	return append(to, piece{dst, src})
}

// copyAll makes the copies, with at most workers goroutines, and returns when all are made.
func copyAll(pieces []piece, workers int) {
	bytes := 0
	for _, p := range pieces {
		bytes += len(p.src)
	}
	if bytes < parallelBytes || workers < 2 {
		for _, p := range pieces {
			copy(p.dst, p.src)
		}
		return
	}
	const chunk = 4 // pieces are often much smaller than pieceBytes
	var next atomic.Int64
	work := func() {
		for {
			end := int(next.Add(chunk))
			if end-chunk >= len(pieces) {
				return
			}
			for _, p := range pieces[end-chunk : min(end, len(pieces))] {
				copy(p.dst, p.src)
			}
		}
	}
	var wg sync.WaitGroup
	for range min(workers, 1+bytes/pieceBytes) - 1 {
		wg.Go(work)
	}
	work()
	wg.Wait()
}
