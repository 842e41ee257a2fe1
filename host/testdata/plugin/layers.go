package main

import (
	"context"
	"fmt"
	"os"

	"github.com/kvport/kvport/connector"
)

// layered also saves layer by layer. Of each block and layer it keeps the digest that it found when the
// layer was announced.
type layered struct{ *worker }

func (w *layered) SaveLayers(ctx context.Context, t *connector.Transfer, kv *connector.KV, progress connector.Progress) error {
	if w.Fault == "early_layers" {
		return nil
	}
	layers := kv.Layout().Layers()
	for n := 0; n < layers; {
		final, err := progress.Wait(ctx, n)
		if err != nil {
			return err
		}
		for _, b := range t.Blocks {
			digests := kv.View(kv.Segments(b.Group)[layers], b.ID)
			for ; n < final; n++ {
				name := fmt.Sprintf("%s.seal%d", w.path(b.Key, w.env.Rank), n)
				if err := os.WriteFile(name, digests[16*n:16*n+16], 0o600); err != nil {
					return err
				}
			}
		}
		n = final
		if w.due("crash_layers") {
			os.Exit(3)
		}
	}
	return w.Save(ctx, t, kv)
}
