package main

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"time"

	"github.com/kvport/kvport/internal/machine"
)

// registers reports whether the connector's engines register with routers, which then tell them of each other.
func (d *demo) registers() bool { return bytes.Contains(d.template(), []byte("@ROUTERS@")) }

// routers is how many there are, see fleet.
const routers = 3

func (d *demo) chooseRegistrars(ctx context.Context) error {
	for range routers {
		if !d.registers() {
			break
		}
		port, err := machine.FreePort(ctx)
		if err != nil {
			return err
		}
		d.registrars = append(d.registrars, net.JoinHostPort("127.0.0.1", port))
	}
	return nil
}

// routersOf are the routers that an engine registers with. The last router has the first of each role only.
func (d *demo) routersOf(name string) []string {
	if name != "P1" && name != "D1" {
		return d.registrars[:routers-1]
	}
	return d.registrars
}

// awaitRegistrations waits until every router has heard of all its engines.
func (d *demo) awaitRegistrations(ctx context.Context, f *fleet) error {
	if !d.registers() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for _, r := range []struct {
		url string
		of  int
	}{{f.straight.URL, 2 * engines}, {f.crossed.URL, 2 * engines}, {f.aimed.URL, 2}} {
		for {
			m, err := d.client.Metrics(ctx, r.url)
			if err == nil && m.Sum("kvport_router_registered_instances") >= float64(r.of) {
				break
			}
			select {
			case <-tick.C:
			case <-ctx.Done():
				return fmt.Errorf("engines do not register with %s: %w", r.url, ctx.Err())
			}
		}
	}
	return nil
}
