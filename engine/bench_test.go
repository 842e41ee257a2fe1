package engine

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/kvport/kvport/connector"
)

// BenchmarkDecode is the time of one token in a batch: with the sim model nearly all of it is
// scheduling, sampling and handing on.
func BenchmarkDecode(b *testing.B) {
	for _, batch := range []int{1, 8} {
		b.Run(fmt.Sprintf("batch=%d", batch), func(b *testing.B) {
			r := start(b, simConfig(b))
			b.ResetTimer()
			var wg sync.WaitGroup
			for i := range batch {
				wg.Go(func() {
					for left, n := b.N/batch+1, 0; left > 0; n++ {
						now := min(left, 200)
						left -= now
						out, err := r.Submit(context.Background(), Request{
							ID: connector.RequestID(fmt.Sprint(i)), Prompt: []int32{int32(i), int32(n % 250)}, MaxTokens: now, IgnoreEOS: true,
						})
						if err != nil {
							b.Error(err)
							return
						}
						collect(out)
					}
				})
			}
			wg.Wait()
		})
	}
}
