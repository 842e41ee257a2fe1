package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"time"
)

// registers reports whether the connector's engines register with routers, which then tell them of each other.
func (o *options) registers() bool { return o.connector == "P2pNcclConnector" }

// routers is how many there are, see fleet.
const routers = 3

func (d *demo) chooseRegistrars(ctx context.Context) error {
	for range routers {
		if !d.registers() {
			break
		}
		port, err := freePort(ctx)
		if err != nil {
			return err
		}
		d.registrars = append(d.registrars, net.JoinHostPort("127.0.0.1", port))
	}
	return nil
}

// registration is the connector's config of one engine. The last router has the first of each role only.
func (d *demo) registration(name, port string) string {
	with := d.registrars
	if name != "P1" && name != "D1" {
		with = with[:routers-1]
	}
	list, _ := json.Marshal(with) // strings cannot fail
	return fmt.Sprintf(`{"routers":%s,"http_port":%s,"register_ms":200}`, list, port)
}

// freePort is a port for a process that must know it beforehand.
func freePort(ctx context.Context) (string, error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	_, port, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		return "", err
	}
	return port, l.Close()
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
