-- Show how far a running job is, if this execution still holds it.
-- meta: as the job's serializer gives it.
local queue, id, eid, meta = unpack(ARGV)
if holds(queue, id, eid) then
  call('HSET', 'rq:job:' .. id, 'meta', meta)
  return 1
end
return 0
